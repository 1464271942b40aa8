"""Optional features. `adaptive.on_import` imports them when a script names them."""
