//! Real reverse proxies in front of a service, started with the configuration files of `deploy/`.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use crate::wait;

/// A reverse proxy that calls sluicegate by forward-auth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gateway {
    /// nginx with `auth_request`.
    Nginx,
    /// Caddy with the directives that `forward_auth` expands to.
    Caddy,
    /// Traefik with `ForwardAuth`.
    Traefik,
}

/// The addresses in the files of `deploy/`.
const LISTENS: &str = "127.0.0.1:8000";
const SLUICEGATE: &str = "127.0.0.1:8080";
const SERVICE: &str = "127.0.0.1:3000";

/// The path polled until a proxy has loaded its routes: Traefik listens before that. Rules of tests exclude this path.
pub const READY: &str = "/ready";

/// Maximum number of ports tried, as another process may take a port first.
const MAX_STARTS: u32 = 5;

/// The main nginx configuration, which keeps everything that nginx writes in its directory.
const NGINX: &str = "daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {}
http {
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    include sluicegate.conf;
}
";

/// Global Caddy options: no admin endpoint and no certificates.
const CADDY: &str = "{
	admin off
	auto_https off
}
";

/// A proxy process, which ends on drop.
pub struct RunningGateway {
    child: Child,
    address: SocketAddr,
    _dir: TempDir,
}

impl Gateway {
    /// Every proxy.
    pub const ALL: [Gateway; 3] = [Gateway::Nginx, Gateway::Caddy, Gateway::Traefik];

    /// Starts the proxy in front of a service with the files of `deploy/`. It sends this token to sluicegate, if any.
    ///
    /// # Panics
    ///
    /// When it is not installed or does not start (the message contains its log), or when Traefik is given a token, which it cannot send.
    pub fn start(self, sluicegate: SocketAddr, service: SocketAddr, token: Option<&str>) -> RunningGateway {
        let mut reason = String::new();
        for _ in 0..MAX_STARTS {
            match self.try_start(sluicegate, service, token) {
                Ok(running) => return running,
                Err(log) => reason = log,
            }
        }
        panic!("{self:?} does not start; its log:\n{reason}");
    }

    fn try_start(
        self,
        sluicegate: SocketAddr,
        service: SocketAddr,
        token: Option<&str>,
    ) -> Result<RunningGateway, String> {
        let dir = TempDir::new().expect("a directory for the proxy");
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
        let address = free.local_addr().expect("the address of a listener");
        drop(free);
        let addresses = [(LISTENS, address), (SLUICEGATE, sluicegate), (SERVICE, service)];
        self.write_files(dir.path(), &addresses, token);

        let log_path = dir.path().join("log");
        let log = File::create(&log_path).expect("a log in the proxy's directory");
        let mut command = self.command(dir.path());
        command.current_dir(dir.path()).env("HOME", dir.path()).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a second handle of the log")).stderr(log);
        let child = command.spawn().unwrap_or_else(|error| match error.kind() {
            ErrorKind::NotFound => panic!("{self:?} is missing: run scripts/servers"),
            _ => panic!("{self:?} cannot be run: {error}"),
        });
        let mut running = RunningGateway { child, address, _dir: dir };
        let mut ended = false;
        wait::until(format_args!("{self:?} listens"), wait::PATIENCE, || {
            ended = !matches!(running.child.try_wait(), Ok(None));
            ended || is_ready(address).unwrap_or(false)
        });
        if ended { Err(fs::read_to_string(log_path).unwrap_or_default()) } else { Ok(running) }
    }

    /// Writes the files of `deploy/` with these addresses and, if given, the token.
    fn write_files(self, dir: &Path, addresses: &[(&str, SocketAddr); 3], token: Option<&str>) {
        let (from, files): (_, &[&str]) = match self {
            Gateway::Nginx => ("nginx", &["sluicegate.conf"]),
            Gateway::Caddy => ("caddy", &["Caddyfile"]),
            Gateway::Traefik => ("traefik", &["traefik.yml", "limits.yml"]),
        };
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy").join(from);
        let mut seen = [false; 3];
        for name in files {
            let mut text = fs::read_to_string(deploy.join(name)).expect("a file of deploy/");
            // In two steps, as a new address may equal one that is still to be replaced.
            for (index, (written, _)) in addresses.iter().enumerate() {
                seen[index] |= text.contains(written);
                text = text.replace(written, &format!("<{index}>"));
            }
            for (index, (_, address)) in addresses.iter().enumerate() {
                text = text.replace(&format!("<{index}>"), &address.to_string());
            }
            if let Some(token) = token {
                let (without, with) = match self {
                    Gateway::Nginx => (r#"Authorization "";"#, format!(r#"Authorization "Bearer {token}";"#)),
                    Gateway::Caddy => ("-Authorization", format!(r#"Authorization "Bearer {token}""#)),
                    Gateway::Traefik => panic!("Traefik passes the client's Authorization on, and no other"),
                };
                assert!(text.contains(without), "{name} has no place for the token");
                text = text.replace(without, &with);
            }
            if self == Gateway::Caddy {
                text.insert_str(0, CADDY);
            }
            fs::write(dir.join(name), text).expect("a file in the proxy's directory");
        }
        assert_eq!(seen, [true; 3], "the files of {from} name {LISTENS}, {SLUICEGATE} and {SERVICE}");
        if self == Gateway::Nginx {
            fs::write(dir.join("nginx.conf"), NGINX).expect("a file in the proxy's directory");
        }
    }

    fn command(self, dir: &Path) -> Command {
        match self {
            Gateway::Nginx => {
                // Debian installs it outside the PATH of ordinary users.
                let sbin = Path::new("/usr/sbin/nginx");
                let program = if sbin.exists() { sbin.to_owned() } else { PathBuf::from("nginx") };
                let mut command = Command::new(program);
                command.arg("-p").arg(dir).arg("-c").arg(dir.join("nginx.conf")).args(["-e", "stderr"]);
                command
            }
            Gateway::Caddy => {
                let mut command = Command::new("caddy");
                command.args(["run", "--adapter", "caddyfile", "--config", "Caddyfile"]);
                command
            }
            Gateway::Traefik => {
                let servers = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.servers");
                let mut command = Command::new(servers.join("traefik-3.7/traefik"));
                command.arg("--configFile=traefik.yml");
                command
            }
        }
    }
}

/// Returns whether the proxy answers and has loaded its routes.
fn is_ready(address: SocketAddr) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(wait::PATIENCE))?;
    write!(stream, "GET {READY} HTTP/1.0\r\nhost: {address}\r\n\r\n")?;
    let mut status = [0; 12];
    stream.read_exact(&mut status)?;
    Ok(!status.ends_with(b"404"))
}

impl RunningGateway {
    /// Returns the address that clients connect to.
    pub fn addr(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for RunningGateway {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}
