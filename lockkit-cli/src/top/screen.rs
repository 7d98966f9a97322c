//! The terminal: takes it, gives it back as it was, and reads its keys.

use std::{io, thread};

use ratatui::{
    DefaultTerminal, Frame,
    crossterm::{
        event::{self, Event},
        terminal::is_raw_mode_enabled,
    },
};
use tokio::sync::mpsc::{Receiver, channel};

/// The terminal, taken until this is dropped. It is dropped with the future that has it, so that a signal gives the terminal back,
/// too. At a panic, on whatever thread, it is given back before the message is printed, which would else be lost with the screen.
pub(super) struct Screen {
    terminal: DefaultTerminal,
}

impl Screen {
    pub(super) fn take() -> io::Result<Self> {
        // This sets a hook for panics, which gives the terminal back.
        match ratatui::try_init() {
            Ok(terminal) => Ok(Self { terminal }),
            Err(error) => {
                // A part of it may be done.
                drop(ratatui::try_restore());
                Err(error)
            }
        }
    }

    /// Draws a frame, of the size that the terminal has now.
    pub(super) fn draw(&mut self, render: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        if !is_raw_mode_enabled()? {
            return Err(io::Error::other("a panic has given the terminal back"));
        }
        self.terminal.draw(render).map(drop)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Given back twice, it would put the cursor on top of the message of a panic.
        if matches!(is_raw_mode_enabled(), Ok(true)) {
            // The terminal may be gone. The cursor comes back when the field is dropped.
            drop(ratatui::try_restore());
        }
    }
}

/// The keys that are pressed, and changes of the terminal's size. They are read on a thread of their own, which no answer of the
/// store can delay; it ends with the process, for a read can't be called back.
pub(super) fn events() -> io::Result<Receiver<io::Result<Event>>> {
    // The rest of a long text that is pasted waits in the terminal.
    let (send, events) = channel(64);
    let read = move || {
        loop {
            let event = event::read();
            let is_end = event.is_err();
            if send.blocking_send(event).is_err() || is_end {
                return;
            }
        }
    };
    thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(events)
}
