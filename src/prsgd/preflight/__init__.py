"""What can be seen to be wrong before a run: this machine, the job that it is part of, and what a user trains with."""
