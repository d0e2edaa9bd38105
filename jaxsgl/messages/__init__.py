"""What front end and engine process say to each other, as msgspec structs."""
