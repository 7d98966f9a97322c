//! Whether CMD has begun, as `lockkit __exec` reports it.
//!
//! A socket that is closed when a process becomes another program tells of it. Without unsafe code a process can be given no descriptors but its
//! standard ones, so `__exec` has it as its standard input, and gets CMD's standard input over it.

use std::{
    io::{self, IoSlice, IoSliceMut, Write},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::Command,
};

use rustix::{
    cmsg_space,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
        recvmsg, sendmsg,
    },
    stdio::dup2_stdin,
};
use tokio::io::AsyncReadExt;

/// What is said before `__exec` becomes CMD. Nothing is said before that, and the end is all that follows.
const BEGINS: u8 = b'b';
/// What follows if it could not.
const FAILED: u8 = b'f';

/// What `lockkit run` hears of the beginning.
#[derive(Debug)]
pub(super) struct Report(tokio::net::UnixStream);

impl Report {
    /// Has this `__exec` report.
    pub(super) fn of(starter: &mut Command) -> io::Result<Self> {
        let (own, other) = UnixStream::pair()?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        let stdin = io::stdin();
        let handed = [stdin.as_fd()];
        message.push(SendAncillaryMessage::ScmRights(&handed));
        sendmsg(&own, &[IoSlice::new(&[0])], &mut message, SendFlags::empty())?;
        own.set_nonblocking(true)?;
        starter.stdin(OwnedFd::from(other));
        Ok(Self(tokio::net::UnixStream::from_std(own)?))
    }

    /// Returns, once that is known, whether CMD has begun. It is known when CMD has ended.
    pub(super) async fn has_begun(mut self) -> bool {
        let mut heard = Vec::new();
        self.0.read_to_end(&mut heard).await.is_ok() && heard == [BEGINS]
    }
}

/// What `__exec` says.
#[derive(Debug)]
pub(super) struct Reporter(UnixStream);

impl Reporter {
    /// Takes the socket from standard input, and puts CMD's there.
    pub(super) fn take() -> io::Result<Self> {
        // Closed when this process becomes CMD, as all descriptors are that are not made by `dup2`.
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(1))];
        let mut message = RecvAncillaryBuffer::new(&mut space);
        recvmsg(&socket, &mut [IoSliceMut::new(&mut [0])], &mut message, RecvFlags::CMSG_CLOEXEC)?;
        let handed = message.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut handed) => handed.next(),
            _ => None,
        });
        dup2_stdin(handed.ok_or(io::ErrorKind::InvalidData)?)?;
        Ok(Self(socket))
    }

    pub(super) fn begins(&mut self) {
        // Else this is the end of `lockkit run`, and of this process.
        drop(self.0.write_all(&[BEGINS]));
    }

    pub(super) fn failed(&mut self) {
        drop(self.0.write_all(&[FAILED]));
    }
}
