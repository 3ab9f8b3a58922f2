"""Planning: hardware and settings become a Plan, or an error with every reason why it cannot run."""
