//! The signals that are passed on to CMD.

use std::io;

use rustix::{
    process::{Signal, getpgrp},
    termios::tcgetpgrp,
};

/// What is passed on. The first four are meant to end; the others mean what CMD makes of them.
pub(super) const FORWARDED: [Signal; 6] =
    [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::USR2];

/// The processes that get a signal that this process got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    /// CMD and all that it started.
    All,
    /// CMD alone.
    Leader,
    /// Those whom it is for have it already.
    Nobody,
}

impl Route {
    /// The way of `signal`, given whether CMD has a process group of its own, and whether this process's group is the
    /// one that the terminal talks to.
    pub(super) fn of(signal: Signal, own_group: bool, in_foreground: bool) -> Self {
        match signal {
            Signal::USR1 | Signal::USR2 => Self::Leader,
            // The terminal has sent it to CMD too, and Ctrl-C twice often means: drop everything.
            Signal::INT | Signal::QUIT if !own_group && in_foreground => Self::Nobody,
            _ => Self::All,
        }
    }
}

/// Whether the terminal sends Ctrl-C and Ctrl-\ to this process's group, and so to CMD, by itself.
pub(super) fn in_foreground() -> bool {
    terminal().and_then(|terminal| Ok(tcgetpgrp(terminal)? == getpgrp())).unwrap_or(false)
}

/// The controlling terminal, if there is one.
pub(super) fn terminal() -> io::Result<std::fs::File> {
    std::fs::File::open("/dev/tty")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_terminal_has_sent_is_not_sent_twice() {
        for (signal, own_group, in_foreground, route) in [
            (Signal::INT, false, true, Route::Nobody),
            (Signal::QUIT, false, true, Route::Nobody),
            (Signal::INT, false, false, Route::All),
            (Signal::INT, true, true, Route::All),
            (Signal::TERM, false, true, Route::All),
            (Signal::HUP, false, true, Route::All),
            (Signal::USR1, true, false, Route::Leader),
            (Signal::USR2, false, true, Route::Leader),
        ] {
            assert_eq!(Route::of(signal, own_group, in_foreground), route, "{signal:?} {own_group} {in_foreground}");
        }
    }
}
