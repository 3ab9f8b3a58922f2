"""What the processes of one run say to each other: lines, frames and files, as plain data."""
