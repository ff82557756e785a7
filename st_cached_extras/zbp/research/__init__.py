"""The baselines and instruments that estimated backwards are compared with, one idea a file.

``register.py`` makes the rules among them modes of :class:`~st_cached_extras.zbp.ZBPConfig`.
"""
