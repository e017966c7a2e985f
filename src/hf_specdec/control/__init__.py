"""Decide how much to draft in each step: controllers, policies and measured step costs."""
