package api

// Port is a TCP port on which a process of a sandbox listens.
type Port struct {
	SandboxVMID int    `json:"sandbox_vmid"`
	Sandbox     string `json:"sandbox" doc:"Name of the sandbox"`
	Session     string `json:"session,omitempty" doc:"Name of its session"`
	Port        int    `json:"port" doc:"In the guest"`
	HostPort    int    `json:"host_port,omitempty" doc:"On the loopback of the daemon's machine; absent if it is not served"`
	URL         string `json:"url,omitempty" doc:"Where a browser on the daemon's machine finds it"`
	Program     string `json:"program,omitempty" doc:"Name of the process, as the guest reports it"`
	Worktree    string `json:"worktree,omitempty" doc:"Git worktree of the process, as the guest reports it; absent for the main checkout"`
	Problem     string `json:"problem,omitempty" doc:"Why host_port is not port, or is absent"`
}

// DNS is the responder of the daemon for names below sandbox.local.
type DNS struct {
	Address string `json:"address,omitempty" doc:"ADDRESS:PORT on the loopback of the daemon's machine; absent if it does not run"`
	Domain  string `json:"domain" doc:"The domain that it resolves to loopback addresses"`
}

// DNSSet starts or stops the responder.
type DNSSet struct {
	Enabled bool `json:"enabled"`
}
