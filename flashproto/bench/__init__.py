"""Benchmarks beside the peers found on this machine: python -m flashproto.bench --help."""
