//! Where a server is.

/// A host and a port.
pub(crate) type Address = (String, u16);

/// An address as it is written in messages: with brackets around a host that has colons.
pub(crate) fn text((host, port): &Address) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}
