"""The sentences themselves: one table a room, from a note's code to its template or function.

Comes in: nothing. Goes out: tables, which `say` joins; a code stands in one table alone.
"""
