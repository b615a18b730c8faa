"""A lane's decode steps on either side: passes, words shared with the device, runs, and when hosts look."""
