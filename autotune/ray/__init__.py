"""The launcher over a Ray cluster: a Launch in, an Exit out, as from any other launcher.

Owns the connection to the cluster, the actor on each host, which hosts trials may use, and the reservation of whole
hosts for a trial. The study stays on the driver; the hosts only measure, each through a fork server of its own. Only
api's setup imports this room, since ray is an optional dependency.
"""
