"""Reading and editing modules through IREE's Python bindings."""
