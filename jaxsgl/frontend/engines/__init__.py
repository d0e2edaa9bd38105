"""The engine processes as the front end has them: their lives, the lines to them, and which one gets a request."""
