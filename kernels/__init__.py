"""Attention over block tables, and what surrounds it: writing K and V to slots, copying blocks.

`reference.py` says what is computed, slowly and obviously; `dispatch.py` picks the fastest path that can do it.
"""
