"""The command line `eagle3`: one module a command, put together in `main`."""
