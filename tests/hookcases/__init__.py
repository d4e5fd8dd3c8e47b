"""Cases of trouble with hooks, each a small training whose records are worked out by plain functions.

`case.py` says what a case is and how it is judged; the others hold the cases, by what causes the trouble.
"""
