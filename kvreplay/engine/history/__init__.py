"""How earlier versions decided, beside the straight path."""
