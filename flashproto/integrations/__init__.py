"""Doors: flashproto in libraries that people use already; docs/doors.md.

Each is imported by its own name, as `import flashproto.integrations.flash_attn`.
"""
