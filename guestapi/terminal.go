package guestapi

// TerminalChoice is the output of 'agentlab-agent terminal'.
type TerminalChoice struct {
	Name    string `json:"name"`              // the multiplexer of new terminals: tmux or zellij
	Missing bool   `json:"missing,omitempty"` // the image does not have Name, so nothing has changed
	Running string `json:"running,omitempty"` // the multiplexer that has terminals, so that nothing has changed
}

// TerminalWeb is the output of 'agentlab-agent open --web'.
type TerminalWeb struct {
	Port    uint16 `json:"port"`            // of the web server, on the loopback of the guest; 0 if the multiplexer has none
	Session string `json:"session"`         // name in the path of the URL
	Token   string `json:"token,omitempty"` // for the login; no other call returns it
}

// Environment is the output of 'agentlab-agent environment'.
type Environment struct {
	Contained bool   `json:"contained"`        // agents run in the dev container of the repository
	Notice    string `json:"notice,omitempty"` // why they do not, although there is one
}
