"""What a real engine does, recorded."""
