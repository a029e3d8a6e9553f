"""The rest of what clients ask a server, one file for each subject."""
