"""Making data sets and checking them."""

DUPLICATES_FILE = "duplicates.json"  # in a folder of `tools/make_data.py duplicates`
