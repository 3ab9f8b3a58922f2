"""The parts of the loop: what it is made of, who may steer it, what it validates and reports."""
