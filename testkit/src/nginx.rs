//! A private nginx in front of an upstream: what others use where the gateway could stand.

use std::fmt;
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context, Result};
use onlyonce_prove::quiet_port;

use crate::service::{Home, Recipe, Service, blocking, program};

/// A reverse proxy with one worker; HTTP/1.1 on one port, HTTP/2 with prior knowledge on another.
#[derive(Clone)]
pub struct Nginx(Arc<Service<NginxRecipe>>);

struct NginxRecipe {
    upstream: SocketAddr,
    h2_port: u16,
}

impl Nginx {
    /// Starts one that passes on everything it can: streaming both ways, WebSocket, bodies of any size.
    ///
    /// # Panics
    /// With its log, when it does not start.
    pub async fn proxy(upstream: SocketAddr) -> Self {
        let start = move || Service::private(NginxRecipe { upstream, h2_port: quiet_port()? });
        Self(Arc::new(blocking(start).await))
    }

    /// Where it speaks HTTP/1.1.
    pub fn addr(&self) -> SocketAddr {
        self.0.home().addr()
    }

    /// Where it speaks HTTP/2 with prior knowledge.
    pub fn h2_addr(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.0.recipe().h2_port))
    }

    /// Its version, for example `1.22.1`.
    ///
    /// # Errors
    /// When it is not installed.
    pub fn version() -> Result<String> {
        let output = Command::new(program("nginx", &[])?).arg("-v").output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let version = said.trim().rsplit_once('/').map(|(_, version)| version.to_owned());
        version.with_context(|| format!("nginx -v says {said:?}"))
    }
}

impl fmt::Debug for Nginx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nginx").field("addr", &self.addr()).finish_non_exhaustive()
    }
}

impl Recipe for NginxRecipe {
    fn name(&self) -> &'static str {
        "nginx"
    }

    fn prepare(&self, home: &Home) -> Result<()> {
        home.write("nginx.conf", self.config(home))?;
        Ok(())
    }

    // One port may be open while the other is still tried.
    fn is_ready(&self, home: &Home) -> bool {
        [home.port(), self.h2_port].iter().all(|port| TcpStream::connect(("127.0.0.1", *port)).is_ok())
    }

    fn command(&self, home: &Home) -> Command {
        // Looked for when the folder is made; here it is there.
        let nginx = program("nginx", &[]).unwrap_or_else(|_| "nginx".into());
        let mut command = home.command(nginx);
        command.arg("-p").arg(home.folder()).args(["-c", "nginx.conf", "-e", "stderr"]);
        command
    }
}

impl NginxRecipe {
    fn config(&self, home: &Home) -> String {
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("    {kind}_temp_path {kind};\n"))
            .concat();
        let (addr, h2_port, upstream) = (home.addr(), self.h2_port, self.upstream);
        format!(
            "daemon off;
master_process off;
pid nginx.pid;
error_log stderr;
events {{ worker_connections 1024; }}
http {{
    access_log off;
{temporary}
    map $http_upgrade $connection_upgrade {{ default upgrade; '' ''; }}
    upstream service {{ server {upstream}; keepalive 16; }}
    client_max_body_size 0;
    ignore_invalid_headers off;
    underscores_in_headers on;
    server {{
        listen {addr};
        listen 127.0.0.1:{h2_port} http2;
        location / {{
            proxy_pass http://service;
            proxy_http_version 1.1;
            proxy_buffering off;
            proxy_request_buffering off;
            proxy_set_header Host $http_host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
            proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
            proxy_set_header X-Forwarded-Proto $scheme;
            proxy_set_header X-Forwarded-Host $http_host;
        }}
    }}
}}
"
        )
    }
}
