"""One file for each operator: the recipes of its launches.  call.py makes calls and ops of them."""
