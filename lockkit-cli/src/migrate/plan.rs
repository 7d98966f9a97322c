//! What a migration would change, before anything does.

use std::{sync::Arc, time::Duration};

use lockkit::{
    Fencing, KeyState, Liveness, LockStore, Mode, Resume, Waiting,
    migrate::{Migration, Side, Start},
    store::{Query, identity},
};
use serde_json::json;

use super::PlanArgs;
use crate::{
    duration::{millis, spoken},
    exit::{Exit, Failure, UNFIT},
    interrupt,
    show::{holder, left, plain, print, print_json, table},
};

/// What there is to say of a migration between two stores.
struct Assessment {
    stores: [Arc<dyn LockStore>; 2],
    held: Vec<KeyState>,
    in_the_way: Vec<String>,
    lost: Vec<String>,
    advice: Vec<String>,
    home: Option<Side>,
    start: Start,
}

pub(super) fn run(args: PlanArgs) -> Exit {
    interrupt::block_on(async move {
        let assessment = Assessment::of(args.stores.open().await?, args.settings.start()).await?;
        if args.json {
            assessment.print_json()?;
        } else {
            assessment.print()?;
        }
        Ok(if assessment.in_the_way.is_empty() { 0 } else { UNFIT })
    })
}

impl Assessment {
    async fn of(stores: [Arc<dyn LockStore>; 2], start: Start) -> Result<Self, Failure> {
        let mut held = stores[0].inspect(&Query::Prefix(String::new())).await?;
        held.retain(|lock| !Migration::is_own(&lock.key));
        let home = Migration::new(Arc::clone(&stores[0]), Arc::clone(&stores[1])).home().ok();
        let mut assessment = Self { stores, held, in_the_way: vec![], lost: vec![], advice: vec![], home, start };
        assessment.check_stores().await?;
        assessment.check_ttl(start.max_ttl);
        assessment.check_held(start.max_ttl);
        assessment.compare();
        Ok(assessment)
    }

    /// Whether these two can be migrated at all.
    async fn check_stores(&mut self) -> Result<(), Failure> {
        if self.home.is_none() {
            self.in_the_way.push("both stores are quorums: neither can be the home of the record".to_owned());
        }
        let mut identities = Vec::new();
        for store in &self.stores {
            match identity(&**store).await {
                Ok(identity) => identities.push(identity),
                // What a store that could not be reached can do is not known either.
                Err(error) if error.is_retryable() => return Err(error.into()),
                Err(error) => self.in_the_way.push(format!("{} has no identity: {error}", store.info().name)),
            }
        }
        if identities.len() == 2 && identities[0] == identities[1] {
            self.in_the_way.push("both URLs lead to one and the same store".to_owned());
        }
        Ok(())
    }

    fn check_ttl(&mut self, max_ttl: Duration) {
        for store in &self.stores {
            let info = store.info();
            if let Some(range) = info.capability.liveness.ttl.as_ref().filter(|range| !range.contains(&max_ttl)) {
                let (name, least, most) = (&info.name, spoken(*range.start()), spoken(*range.end()));
                self.in_the_way.push(format!("{name} takes times to live from {least} to {most} only: see --max-ttl"));
            }
        }
    }

    /// What is held now that could not be held in the new store.
    fn check_held(&mut self, max_ttl: Duration) {
        let most = self.stores[1].info().capability.max_key_bytes;
        for state in &self.held {
            let name = plain(state.key.as_str());
            if state.key.as_str().len() > most {
                self.in_the_way.push(format!("the name {name} is longer than the {most} bytes of the new store"));
            }
            for held in &state.holders {
                let who = plain(&holder(held));
                if held.mode != Mode::Exclusive {
                    self.in_the_way
                        .push(format!("{name} is held as {} by {who}: only exclusive locks move", held.mode));
                }
                if held.token.is_none() {
                    self.advice
                        .push(format!("{name} is held by {who}, which is no lockkit client: it must stop first"));
                }
                if held.info.is_done() {
                    let left = left(held);
                    self.advice.push(format!(
                        "{name} is kept for {left} by {who} (keep_for): no step leaves its store before the end of that, \
                         or lockkit break"
                    ));
                } else if held.remaining.is_some_and(|left| left > max_ttl) {
                    self.in_the_way.push(format!("{name} is held by {who} for longer than --max-ttl"));
                }
            }
        }
    }

    /// What the new store does otherwise.
    fn compare(&mut self) {
        let [old, new] = [&self.stores[0], &self.stores[1]].map(|store| &store.info().capability);
        if old.fifo {
            self.lost.push("first-come-first-served locks: refused from the deployment of the migration on".to_owned());
        }
        if old.shared || old.permits {
            self.lost.push("shared locks and semaphores: refused from the deployment of the migration on".to_owned());
        }
        if old.resume > Resume::None {
            let until = match new.resume {
                Resume::None => "from then on: the new store has none",
                later if later < old.resume => {
                    "until the migration is over; in the new store they end with the session of the client that let go of them"
                }
                _ => "until the migration is over",
            };
            self.lost.push(format!("leases that outlive their guard (detach, resume): refused {until}"));
        }
        if old.keeps {
            let until = if new.keeps { "until the migration is over" } else { "from then on: the new store has none" };
            self.lost.push(format!("locks that are kept for a time (keep_for, --once-per): refused {until}"));
        }
        if new.fencing == Fencing::BestEffort || new.fencing == Fencing::None {
            self.lost
                .push("fences that go on rising when the new store loses data: it does not promise that".to_owned());
        }
        if old.liveness.session.is_some() != new.liveness.session.is_some() {
            let (before, after) = (liveness(&old.liveness), liveness(&new.liveness));
            self.advice.push(format!("the lock of a dead holder is free {after}; before: {before}"));
        }
        if old.waiting != new.waiting {
            let (before, after) = (waiting(old.waiting), waiting(new.waiting));
            self.advice.push(format!("a waiter {after}; before, it {before}"));
        }
        self.advice.push("several locks at once (multi) work within the one store of the migration only".to_owned());
    }

    fn print(&self) -> Result<(), Failure> {
        let names = [0, 1].map(|place: usize| self.stores[place].info().name.to_string());
        let mut rows = table(&["", "OLD", "NEW"]);
        let mut row = |what: &str, of: &dyn Fn(&dyn LockStore) -> String| {
            rows.add_row([what.to_owned(), of(&*self.stores[0]), of(&*self.stores[1])]);
        };
        row("store", &|store| store.info().name.to_string());
        row("a dead holder's lock is free", &|store| liveness(&store.info().capability.liveness));
        row("a waiter", &|store| waiting(store.info().capability.waiting).to_owned());
        row("fences", &|store| format!("{:?}", store.info().capability.fencing).to_lowercase());
        row("longest name", &|store| format!("{} bytes", store.info().capability.max_key_bytes));
        let home = self.home.map_or("none", |home| &names[home.index()]);
        let mut text = format!("{}\n\nhome of the record: {home}\n", rows.trim_fmt());
        text += &format!("locks held now: {}\n", self.held.len());
        text += &format!(
            "each step out of the phase both waits {}; locks go on working meanwhile\n",
            spoken(self.start.drain())
        );
        for (title, lines) in
            [("In the way", &self.in_the_way), ("Lost on the way", &self.lost), ("To know", &self.advice)]
        {
            if !lines.is_empty() {
                text += &format!("\n{title}\n");
                lines.iter().for_each(|line| text += &format!("  - {line}\n"));
            }
        }
        text += "\nSteps: start; deploy every service with migrate:?from=URL&to=URL; advance to shadow, to try the new store\n\
                 out; advance to both; advance to new; deploy with the new store's URL; finish. rollback leads back from each.\n";
        print(|out| out.write_all(text.as_bytes()))
    }

    fn print_json(&self) -> Result<(), Failure> {
        let held = self.held.iter().flat_map(|state| state.holders.iter().map(move |held| (state, held)));
        let held: Vec<_> = held
            .map(|(state, held)| {
                json!({
                    "key": state.key.as_str(),
                    "holder": held.info.as_str(),
                    "mode": held.mode.to_string(),
                    "remaining_ms": held.remaining.map(millis),
                })
            })
            .collect();
        print_json(&json!({
            "from": &*self.stores[0].info().name,
            "to": &*self.stores[1].info().name,
            "home": self.home.map(|home| home.to_string()),
            "drain_ms": millis(self.start.drain()),
            "in_the_way": self.in_the_way,
            "lost_on_the_way": self.lost,
            "advice": self.advice,
            "held": held,
        }))
    }
}

fn liveness(liveness: &Liveness) -> String {
    match (&liveness.ttl, liveness.session) {
        (Some(_), None) => "after its time to live".to_owned(),
        (None, Some(session)) => format!("{} after its last sign of life", spoken(session)),
        (Some(_), Some(session)) => format!("after its time to live, or {} without a sign of life", spoken(session)),
        (None, None) => "never".to_owned(),
    }
}

fn waiting(waiting: Waiting) -> &'static str {
    match waiting {
        Waiting::Poll => "asks again and again",
        Waiting::Notify => "is woken, with all others",
        _ => "is woken in its turn",
    }
}
