"""Read the definitions of tasks: the tasks below a group, their data, and whether they can guard a release.

No code of a task runs here, and no data of a task is loaded except by ``datasets``.
"""
