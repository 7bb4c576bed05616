"""Studies of realignment: methods that are the same but for their schedule and their rollback method."""
