"""uvicorn's protocols with limits, event streams, and the chat page.

uvicorn is pinned to one minor version, because these parts of it are overridden or used that its
documentation does not promise (asyncio's and httptools' callbacks, and what `Config` and `Server`
document, are not among them):

    HTTP connections (`http_protocol`, `half_closed`)
    _start_asgi_task                  begins the answer's time limits, and offers the raw writer
    _should_upgrade                   WebSockets only, and refused in our format
    handle_websocket_upgrade          likewise; the timers of HTTP end
    on_response_complete              the next request of the pipeline; the last answer of a drain
    send_400_response                 a refusal in our format
    _unset_keepalive_if_required      there is one timer for all limits instead of uvicorn's:
    timeout_keep_alive_handler        closes after the data that has arrived is read
    pipeline, cycle, flow             how many requests wait, whose answer is sent, who is too slow
    app_state                         tells the application that a connection is refused
    write_paused                      whether the raw writer has room

    an answer (`http_protocol`, `half_closed`)
    response_started                  whether a client that left can still be found out about
    response_complete                 whether a connection is idle
    chunked_encoding                  how the raw writer frames a body; HTTP/1.0 has no chunks
    expected_content_length           likewise

    WebSockets (`websocket_protocol`)
    handle_connect                    offers the raw writer
    start_keepalive, keepalive_timeout  frees the handshake; a pong that has arrived is read first
    handle_ping                       not answered after a failure
    handle_parser_exception           sends the close code, and waits for the client to close
    send_receive_event_to_app         text that is not UTF-8 is refused
    conn, handshake_initiated, handshake_complete    a handshake that is too large is answered
    close_sent, disconnected, queue, close_timer, pong_timer    a close of our own
    frames, curr_msg_data_type        what the message is
    writable                          whether the raw writer has room

    the server (`server`, `launch/process`)
    server_state, default_headers     connections that are open; headers of answers before ASGI
"""
