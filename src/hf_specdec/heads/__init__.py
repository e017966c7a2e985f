"""Draft heads: small modules that are trained, stored and loaded on their own."""
