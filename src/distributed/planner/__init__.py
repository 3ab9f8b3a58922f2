"""Can it run, and how: hardware and wishes become a Plan."""
