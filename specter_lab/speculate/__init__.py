"""Propose tokens, check them, choose how many to propose: drafters, verification, draft length."""
