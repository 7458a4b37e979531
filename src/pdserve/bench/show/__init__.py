"""How results are shown: tables, JSON files and plots."""
