"""Device code, references and input cases, one folder a family. Importing this package imports no
compiler.
"""
