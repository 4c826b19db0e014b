"""What a construction's memory is made of: the terms that the schedules' costs share (paper, Eqs. 1 and 9)."""
