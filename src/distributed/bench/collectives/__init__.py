"""What sending costs between the processes of one machine."""
