//! The view that lasts until a key ends it.

use std::{io, time::Instant};

use lockkit::Locker;
use ratatui::crossterm::event::Event;
use tokio::time::sleep;

use super::{
    Args,
    draw::{REDRAW, Scene, draw},
    looks::{Answer, Looks},
    screen::{self, Screen},
    view::{View, Wish},
};
use crate::exit::{Exit, Failure, LOST};

pub(super) async fn run(args: Args, locker: Locker) -> Exit {
    let info = locker.info().clone();
    let mut view = View::new(args.sort);
    let mut looks = Looks::new(locker.clone(), args.prefix.clone(), args.every);
    let mut screen = Screen::take().map_err(|error| Failure::system("set up the terminal", &error))?;
    let mut events = screen::events().map_err(|error| Failure::system("read the keys", &error))?;
    // One question at a time, so that no answer overtakes a newer one.
    let mut question = None;
    loop {
        show(&mut screen, &info.name, &info.warnings, &looks, &mut view)?;
        tokio::select! {
            event = events.recv() => {
                let event = event.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()));
                let event = event.map_err(|error| Failure::system("read the keys", &error))?;
                // Each other event, such as a change of size, is a reason to draw.
                let Event::Key(key) = event else { continue };
                let locks = view.order.sorted(&looks.watch);
                match view.pressed(key, &locks) {
                    Wish::Nothing => {}
                    Wish::Quit => return Ok(0),
                    Wish::Filter(prefix) => {
                        question = None;
                        looks = Looks::new(locker.clone(), prefix, args.every);
                    }
                }
            }
            answer = answer(&mut question), if question.is_some() => {
                question = None;
                looks.take(answer);
            }
            () = sleep(looks.due().saturating_duration_since(Instant::now())), if question.is_none() => {
                question = Some(Box::pin(looks.ask(view.order, view.place)));
            }
            () = sleep(REDRAW) => {}
        }
    }
}

async fn answer<F: Future<Output = Answer> + Unpin>(question: &mut Option<F>) -> Answer {
    match question {
        Some(question) => question.await,
        None => std::future::pending().await,
    }
}

fn show(screen: &mut Screen, store: &str, warnings: &[String], looks: &Looks, view: &mut View) -> Result<(), Failure> {
    let locks = view.order.sorted(&looks.watch);
    let scene = Scene { store, warnings, looks, locks: &locks, now: Instant::now() };
    let drawn = screen.draw(|frame| draw(frame, &scene, view));
    drawn.map_err(|error| Failure::new(LOST, format!("could not write the output: {error}")))
}
