"""The prefix store: physical KV blocks, the radix tree over them, and who gives them up.

`cache.PrefixCache` is the one face that a scheduler talks to.
"""
