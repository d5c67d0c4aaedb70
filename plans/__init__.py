"""Pure Python: catalog, cells, planning rules, pack manifest, certificates, coverage. Imports
neither torch nor cutlass.
"""
