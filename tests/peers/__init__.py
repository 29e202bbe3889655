"""Other people's implementations under this package's test kit, each judged by its own promises.

A file a family says how its functions are called with the kit's signatures and what their
documentation promises; `judge` runs the kit, `table` writes what came out.
"""
