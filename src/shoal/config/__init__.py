"""Settings: frozen dataclasses, parsed once, validated with words."""
