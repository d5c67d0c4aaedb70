"""A CPU that runs what the compiler makes: compiled host functions up to their launches, and the
PTX of what they launch.
"""
