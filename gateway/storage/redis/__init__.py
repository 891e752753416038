"""Redis: its clients, their errors and health, and what gateways share in it beside sessions.

redis-py is pinned to one major version, because these parts of it are overridden or used that its
documentation does not promise:

    the pool and its connections (`link`, `trips`)
    connect_check_health              a pool that is closed leaves no connection open
    send_packed_command               uvloop's error of a closed connection becomes redis-py's
    connection_class                  tells each pool's connections that it is closed
    get_connection, release           a pipeline without a client (`lean_round_trip`):
    pack_commands, read_response      its bookkeeping would cost more than the round trip
    disconnect                        a connection that may hold unread replies is not used again

    addresses (`cluster`, `url`)
    key_slot                          which node of a cluster has a key
    parse_url                         the options of an address
"""
