"""What the services share: ids, messages, the bus and its keys, configuration, logs, process life.

Imports nothing else of the project.
"""
