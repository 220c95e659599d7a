"""`Semaphore`: at most N holders of one name, in the order of arrival, and none leaks."""
