"""`once`: a job that runs on one of many workers."""
