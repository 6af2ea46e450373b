"""Settings: their schema, where each value came from, and every mistake in them.

`schema` holds the settings; `loader.load` reads them from all sources. Importing this package imports nothing more,
so that whoever only needs `Settings` does not pay for a YAML parser.
"""
