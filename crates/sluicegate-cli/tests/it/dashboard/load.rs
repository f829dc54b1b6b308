//! Background load with the labels of many users.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use crate::http_client::Client;

/// The pause between two checks varies between these bounds, so that the charts are not flat.
const SHORTEST_PAUSE: Duration = Duration::from_millis(6);
const LONGEST_PAUSE: Duration = Duration::from_millis(18);
/// The period of the variation, in checks.
const WAVE: u64 = 1_500;

/// Load on a server until dropped. It reconnects after errors.
pub(crate) struct Load {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Load {
    pub(crate) fn on(address: &str, token: Option<&str>) -> Self {
        let end = Arc::<AtomicBool>::default();
        let (stop, address) = (Arc::clone(&end), address.to_owned());
        let authorization = token.map(|token| format!("Bearer {token}"));
        let thread = thread::spawn(move || {
            let mut client = None;
            for number in 0_u64.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                client = client.or_else(|| Client::connect(&address).ok());
                let headers: Vec<_> = authorization.iter().map(|value| ("authorization", &**value)).collect();
                let is_ok = client.as_mut().is_some_and(|client| {
                    client
                        .call("POST /v1/check", &headers, &body(number))
                        .is_ok_and(|response| response.status == 200)
                });
                if !is_ok {
                    client = None;
                }
                pause(number);
            }
        });
        Self { end, thread: Some(thread) }
    }
}

#[expect(clippy::disallowed_methods, reason = "the load runs in real time")]
fn pause(number: u64) {
    let phase = (number % WAVE) as f64 / WAVE as f64;
    let height = (phase * std::f64::consts::TAU).sin().mul_add(0.5, 0.5);
    thread::sleep(SHORTEST_PAUSE + (LONGEST_PAUSE - SHORTEST_PAUSE).mul_f64(height));
}

/// A few users send most requests; one route has no rule.
fn body(number: u64) -> String {
    let user = (number % 7) * (number % 3);
    let tenant = ["acme", "acme", "globex", "initech"][number as usize % 4];
    match number % 10 {
        0 | 1 => format!(r#"{{"labels":{{"route":"login","ip":"203.0.113.{}"}}}}"#, number / 10 % 9 + 1),
        2..5 => format!(r#"{{"labels":{{"route":"search","user":"user-{user}","tenant":"{tenant}"}}}}"#),
        5 => format!(r#"{{"labels":{{"route":"export","tenant":"{tenant}"}}}}"#),
        6 => r#"{"labels":{"route":"health"}}"#.to_owned(),
        _ => format!(r#"{{"labels":{{"route":"home","user":"user-{user}","api_key":"s3cret-key"}}}}"#),
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
