"""Doors: flashproto in libraries that people use already, and rollouts as trees; docs/doors.md.

Each is imported by its own name, as `import flashproto.integrations.flash_attn`.
"""
