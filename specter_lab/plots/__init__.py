"""Figures made from a trace alone: functions that return a figure and never show it."""
