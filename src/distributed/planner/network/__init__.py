"""What connects this machine to others, what that calls for, and the profiles of clouds."""
